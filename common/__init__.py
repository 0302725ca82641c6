"""What the stages share: setting up (setup.py), timing (timing.py), tables and files (report.py), images (images.py)."""
