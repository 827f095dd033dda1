"""Ships for plugin authors: conformance kit, scenarios, scripted device, tiny models."""
