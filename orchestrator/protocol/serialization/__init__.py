"""Forms of a run's state: the hand-off between steps, slim snapshots, and what is cut from them.

Pure: knows no store. The complete form is `stepfleet.orchestrator.client.checkpoints`.
"""
