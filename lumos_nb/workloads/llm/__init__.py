"""Training of large language models: its layers, pipeline schedules, memory and step times."""
