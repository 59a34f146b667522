"""Rollouts: plain ASGI in, one replica's HTTP out. Reads the fleet and writes leases and observations into it.

app          takes the routed paths, reads requests
relay        one rollout: choose, try, judge, deliver, or try elsewhere (retry: whether and when)
passing      a stream on its way through
verdict      what follows from a whole answer
upstream     the HTTP client: pool (connections of one replica), connection, exchange (one answer)
headers      which cross the proxy
answers      what the proxy itself says
budget       what may be held at once
watch        notices clients that leave, and rollouts that take too long
door         who may come in
server_protocol  a client's connection, which uvicorn hands over: arrival (how much, how long), client_request (ASGI)
outbox       what is sent, at the end of the event loop's turn
"""
