// The one connection of the page: server-sent events, opened again whenever it ends.

const AGAIN_MS = 2000;
const SILENT_MS = 5000; // a snapshot comes every second

/**
 * Read the stream for as long as the page is open. `on` has a function for each kind of message, and `connected(bool)`,
 * which is told whether messages come.
 */
export function read(url, on) {
  let source;
  let silence;

  function open() {
    source = new EventSource(url);
    for (const kind of ["history", "happened", "snapshot"]) {
      source.addEventListener(kind, (message) => {
        heard();
        on[kind](JSON.parse(message.data));
      });
    }
    source.addEventListener("error", () => {
      on.connected(false);
      // The browser comes back by itself, unless it was given an answer that is no stream.
      if (source.readyState === EventSource.CLOSED) setTimeout(open, AGAIN_MS);
    });
    heard();
  }

  function heard() {
    clearTimeout(silence);
    silence = setTimeout(() => on.connected(false), SILENT_MS);
    if (source.readyState === EventSource.OPEN) on.connected(true);
  }

  open();
}
