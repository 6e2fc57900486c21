"""The object tier, step by step beside the reference model."""

from object_subjects import FOLDER

from kvtier.testing.stateful import tier_machine

TestFolder = tier_machine(FOLDER).TestCase
