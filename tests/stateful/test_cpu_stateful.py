"""The cpu tier beside the memory model."""

from subjects import CPU

from kvtier.testing.stateful import tier_machine

TestCpuBesideTheModel = tier_machine(CPU).TestCase
