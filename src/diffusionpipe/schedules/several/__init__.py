"""Schedules of several models, and of passes that only look ahead."""
