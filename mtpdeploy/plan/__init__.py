"""From a deployment and what is known of its host to what will be done: command, files, steps, memory, findings."""

from mtpdeploy.plan.known import Known, known_of
from mtpdeploy.plan.plan import Plan, Step, make_plan

__all__ = ["Known", "Plan", "Step", "known_of", "make_plan"]
