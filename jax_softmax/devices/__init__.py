"""Arrays that are spread over several devices: what each of them does."""
