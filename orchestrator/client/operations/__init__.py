"""What operators of a fleet call: approvals, limits, costs, schedules, the response cache."""
