"""Where leases live, one file for each store. A store never imports another."""
