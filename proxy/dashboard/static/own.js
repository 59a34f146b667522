// What each replica says of itself: how full its KV cache is, and how many rollouts wait in it.

const NAMES = { kvUsed: "vllm:kv_cache_usage_perc", waiting: "vllm:num_requests_waiting" };

const KEPT_MS = 2000;

const SAMPLE = /^([\w:]+)\{replica="(\d+)".*\} (\S+)$/;

const url = new URL("../replicas/metrics", import.meta.url);
for (const name of Object.values(NAMES)) url.searchParams.append("name[]", name);

let askedAt = -KEPT_MS;
let own = new Map();

/** Return what is known of each replica, by its index: { kvUsed, waiting }. Asks anew every two seconds. */
export function ownWords() {
  if (!document.hidden && performance.now() - askedAt >= KEPT_MS) {
    askedAt = performance.now();
    ask();
  }
  return own;
}

async function ask() {
  try {
    const answer = await fetch(url);
    own = answer.ok ? parse(await answer.text()) : new Map();
  } catch {
    own = new Map(); // the page says already that there is no connection
  }
}

/** Of several engines of one replica the fullest counts. */
function parse(page) {
  const found = new Map();
  for (const line of page.split("\n")) {
    const [, metric, replica, value] = SAMPLE.exec(line) ?? [];
    const field = Object.keys(NAMES).find((name) => NAMES[name] === metric);
    if (!field) continue;
    const known = found.get(Number(replica)) ?? {};
    found.set(Number(replica), { ...known, [field]: Math.max(known[field] ?? 0, Number(value)) });
  }
  return found;
}
