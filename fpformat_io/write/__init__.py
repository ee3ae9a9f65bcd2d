"""From a save plan to durable segments: transfers, workers, staging memory, volumes."""
