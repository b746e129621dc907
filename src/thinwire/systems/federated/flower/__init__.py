"""A federation deployed with Flower: its apps, their records and certificates. Needs ``thinwire[flower]``."""
