"""A shared folder as NFS and Lustre play it: one folder is the server, every mount of it is a client with caches."""
