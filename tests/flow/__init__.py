"""Raw file to dataset under faults: kill, errno, power loss, two writers."""
