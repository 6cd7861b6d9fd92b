"""Arrays that are sharded over several devices: what each device does."""
