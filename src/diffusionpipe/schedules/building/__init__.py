"""Building blocks of schedules: shapes, patterns, directions and greedy constructions."""
