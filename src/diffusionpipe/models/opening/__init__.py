"""Models found and opened: folders, the hub, shipped configurations, classes that have no family."""
