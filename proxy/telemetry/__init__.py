"""Look at the fleet for Prometheus and for the log: reads everything, changes nothing.

fleet_state    what the fleet knows anyway, read when Prometheus asks
event_counts   what has happened, counted from the fleet's events
loop_lag       how late the event loop is
summary        the line that the log gets every minute
registry       all of these and the process itself, in one registry
"""
