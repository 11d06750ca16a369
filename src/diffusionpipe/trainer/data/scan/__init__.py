"""Places of samples to checked data sets: folders, tables, shards, several sources."""
