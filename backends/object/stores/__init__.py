"""Rooms of stores."""
