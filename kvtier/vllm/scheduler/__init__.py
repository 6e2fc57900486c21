"""Rooms of scheduler."""
