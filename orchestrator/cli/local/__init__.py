"""Workers and servers on this machine: started, supervised, ended."""
