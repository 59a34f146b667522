"""Which replica gets a rollout. Decisions are plain functions over plain data; the only state is the prefix index."""
