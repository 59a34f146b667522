"""The status page at /proxy/dashboard: what people see of a run while it goes on.

`static/` is the page as the browser gets it, without a build step; `routes` serves it and the one stream of events that
it reads; `snapshot` says what it shows now, `history` what its charts show. It reads fleet and router and changes
nothing.
"""
