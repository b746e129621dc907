"""One file per peer: functions that make the bench's workload train the peer's way. No measuring here."""
