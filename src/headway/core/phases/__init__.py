"""The phases of one step, in the order in which `Scheduler.schedule` runs them. None knows another."""
