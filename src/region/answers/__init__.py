"""What can be deployed, as the racks say it: asking them, combining what they answer, and writing the answer down."""
