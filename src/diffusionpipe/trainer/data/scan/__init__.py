"""Makes checked data sets of the places that hold samples: folders, tables, shards, several sources."""
