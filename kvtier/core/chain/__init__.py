"""Rooms of chain."""
