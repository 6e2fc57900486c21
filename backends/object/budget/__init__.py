"""Rooms of budget."""
