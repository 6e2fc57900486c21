"""Rooms of adaptive."""
