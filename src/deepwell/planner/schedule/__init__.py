"""Pipeline schedules: actions of each rank, and their simulation. Pure."""
