"""What people start: the command line, emulated networks, benchmarks, reports, pictures, the doctor."""
