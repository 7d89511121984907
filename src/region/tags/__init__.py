"""Which nodes have which tag? Those that people say, or those whose documents its definition, an XPath, is true of."""
