"""Results of frozen layers that are kept in files."""
