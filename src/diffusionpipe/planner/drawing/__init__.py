"""Plans for drawing samples: forwards alone, priced, forecast, and parallel in time."""
