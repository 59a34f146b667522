"""Trainers that publish through a TrainerClient without knowing it. Each is imported by itself, where it is used."""
