// Follows a recording on the open page: the server fills the sources of its plots, and sends its markup before and after.
// What differs between these is changed on the page, and nothing else: what the reader has opened or chosen stays.
;(() => {
  const parse = (html) => new DOMParser().parseFromString(html, "text/html").body
  const isElement = (node) => node.nodeType === Node.ELEMENT_NODE

  function patchAttributes(live, before, after) {
    for (const {name} of [...before.attributes]) if (!after.hasAttribute(name)) live.removeAttribute(name)
    for (const {name, value} of [...after.attributes]) if (before.getAttribute(name) !== value) live.setAttribute(name, value)
  }

  // Names of the plots in a part of the page. Parts with the same ones are the same part: these are never removed.
  function plotsIn(node) {
    if (!isElement(node)) return ""
    return Array.from([node, ...node.querySelectorAll("[data-root-id]")], (each) => each.dataset.rootId ?? "").join("")
  }

  // Of parts in order, from one on, the index of the first that is of the same kind as another; -1 if there is none
  // before the next one with plots.
  function findAlike(parts, from, other) {
    const kindOf = (node) => [node.nodeName, node.id, plotsIn(node)].join()
    const next = parts.findIndex((part, index) => index >= from && (kindOf(part) === kindOf(other) || plotsIn(part)))
    return next >= 0 && kindOf(parts[next]) === kindOf(other) ? next : -1
  }

  // What is on the page may have more than the markup, at its end.
  function patch(live, before, after) {
    if (before.isEqualNode(after) && !after.matches?.("[data-asked], :has([data-asked])")) return
    if (live.nodeName !== before.nodeName || before.nodeName !== after.nodeName) throw new Error("another element")
    if (!isElement(after)) {
      live.nodeValue = after.nodeValue
      return
    }
    if (after.hasAttribute("data-root-id")) return
    if (after.hasAttribute("data-asked")) {
      // Scripts have asked the server for what is there.
      if (live.innerHTML === after.innerHTML) return
      const held = [...live.querySelectorAll("*")].indexOf(document.activeElement)
      live.innerHTML = after.innerHTML
      if (held >= 0) live.querySelectorAll("*")[held]?.focus({preventScroll: true})
      return
    }
    patchAttributes(live, before, after)
    const [had, shown] = [before, live].map((node) => [...node.childNodes])
    if (shown.length < had.length) throw new Error("less than there was")
    let at = 0
    const removeUntil = (end) => {
      for (; at < end; at++) {
        if (plotsIn(had[at])) throw new Error("one plot fewer")
        shown[at].remove()
      }
    }
    for (const child of after.childNodes) {
      const same = findAlike(had, at, child)
      if (same >= 0) {
        removeUntil(same)
        patch(shown[same], had[same], child)
        at = same + 1
      } else if (plotsIn(child)) {
        throw new Error("one plot more")
      } else {
        live.insertBefore(document.importNode(child, true), shown[at] ?? null)
      }
    }
    removeUntil(had.length)
  }

  window.overlapscope.followInPlace = ({wanted, rendered}) => {
    const patienceMs = 30_000
    let asked = 0
    let settle = null

    function take() {
      const {id, before, after} = rendered.data
      if (id[0] !== asked || !settle) return
      let isShown = false
      try {
        if (after[0]) {
          patch(document.body, parse(before[0]), parse(after[0]))
          isShown = true
        }
      } catch {
        // The page is opened again.
      }
      settle(isShown)
    }

    window.overlapscope.on(rendered, "data", take)
    // Returns whether the page could be updated; if not, it has to be opened again.
    window.overlapscope.showLatest = () =>
      new Promise((resolve) => {
        settle = resolve
        asked += 1
        wanted.data = {id: [asked], query: [location.search.slice(1)]}
        setTimeout(() => resolve(false), patienceMs)
      })
  }
})()
