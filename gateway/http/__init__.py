"""HTTP/1.1 as bytes, on both sides of the gateway, and what is masked in it. Begin with `client_connection`."""
