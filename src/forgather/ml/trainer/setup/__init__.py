"""Set-up of a trainer: refusals at construction, and the phases of preparation in their order (`phases`).

Everything here runs before the first step; nothing of it runs in a step.
"""
