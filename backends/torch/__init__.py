"""What the backends that run on torch share. It registers nothing and is imported only once a device is created."""
