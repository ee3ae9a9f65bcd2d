"""The console commands of fpformat: convert, inspect, verify. Installed as ``fpformat_tools``."""
