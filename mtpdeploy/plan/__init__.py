"""From a deployment and what is known of its host to what will be done: command, files, steps, memory, findings."""

from mtpdeploy.plan.calibration import Compared, beside, calibrate
from mtpdeploy.plan.known import Known, known_of
from mtpdeploy.plan.plan import Plan, Step, make_plan

__all__ = ["Compared", "Known", "Plan", "Step", "beside", "calibrate", "known_of", "make_plan"]
