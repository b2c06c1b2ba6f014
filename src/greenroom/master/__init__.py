"""The master role: it places claims, keeps node leases and divides pools."""
