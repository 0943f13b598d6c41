"""The metadata is in setup.cfg; this file only maps the two top-level data folders into the package."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["mtpdeploy", "mtpdeploy.*"]), "mtpdeploy.templates", "mtpdeploy.inventories"])
