// Small helpers for the page's elements. Whatever comes from the server becomes text, never markup.

/** Make an element. `attributes` are set as they are; `children` are elements or text. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set an element's text if it is another one, so that selections and screen readers are left in peace. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Set an attribute if it has another value. */
export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/**
 * Make the children of `parent` follow `items`: `make(item)` gives the element of a new key, `update(node, item)` fills
 * it. Elements whose key stays are kept.
 */
export function follow(parent, items, { key, make, update }) {
  const known = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = known.get(name);
    known.delete(name);
    if (!node) {
      node = make(item);
      node.dataset.key = name;
    }
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
    update(node, item);
  }
  for (const node of known.values()) node.remove();
}

/** Make a table row whose cells are found again by `cellOf`. `columns` are [name, title, class]. */
export function tableRow(columns) {
  const cells = columns.map(([name, title, look]) =>
    el("td", { role: "cell", "data-field": name, "data-title": title, class: look ?? "" }),
  );
  return el("tr", { role: "row" }, ...cells);
}

/** Find the part of a row or list item that is called `field`. */
export function part(node, field) {
  return node.querySelector(`[data-field="${field}"]`);
}

/** Show a state: by its word, and by a colour that says how good it is. */
export function setBadge(node, word, tone) {
  setText(node, word);
  setAttribute(node, "class", "badge");
  setAttribute(node, "data-tone", tone);
}
