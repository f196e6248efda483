"""Plans before they run and as they are measured: forecasts, compiled plans, and the tuner."""
