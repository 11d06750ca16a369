"""The published schedules, a module each, as functions of their sizes."""
