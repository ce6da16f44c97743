"""What a run will do and cost before it starts: experiment, schedule, rates, speed, plan."""
