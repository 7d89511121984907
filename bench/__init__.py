"""What Stanchion costs, as ratios to something else measured in the same run: ``python -m bench --help``."""
