"""Set-up of a trainer: validation at construction, and the phases of preparation in order (`phases`).

`BaseTrainer` and `Trainer` call it before the first step. Nothing here runs during a step.
"""
