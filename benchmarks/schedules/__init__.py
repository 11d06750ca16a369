"""All families of schedules and the search for orders: simulated everywhere, measured as processes that wait."""
