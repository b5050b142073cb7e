// Follows a recording on the open page: the server fills the sources of its plots, and sends its markup before and after.
// What differs between these is changed on the page, and nothing else: what the reader has opened or chosen stays.
;(() => {
  const parse = (html) => new DOMParser().parseFromString(html, "text/html").body
  const isElement = (node) => node.nodeType === Node.ELEMENT_NODE

  function patchAttributes(live, before, after) {
    for (const {name} of [...before.attributes]) if (!after.hasAttribute(name)) live.removeAttribute(name)
    for (const {name, value} of [...after.attributes]) if (before.getAttribute(name) !== value) live.setAttribute(name, value)
  }

  // What is on the page may have more than the markup, at its end.
  function patch(live, before, after) {
    if (before.isEqualNode(after)) return
    if (live.nodeName !== before.nodeName || before.nodeName !== after.nodeName) throw new Error("another element")
    if (!isElement(after)) {
      live.nodeValue = after.nodeValue
      return
    }
    if (after.hasAttribute("data-root-id")) return
    patchAttributes(live, before, after)
    const [had, has, shown] = [before, after, live].map((node) => [...node.childNodes])
    if (had.length === has.length && shown.length >= had.length) {
      had.forEach((child, index) => patch(shown[index], child, has[index]))
    } else if (live.querySelector("[data-root-id]")) {
      throw new Error("another plot")
    } else {
      live.replaceChildren(...has.map((child) => document.importNode(child, true)))
    }
  }

  window.overlapscope.followInPlace = ({wanted, answer}) => {
    const patienceMs = 30_000
    let asked = 0
    let settle = null

    function take() {
      const {id, before, after} = answer.data
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

    window.overlapscope.on(answer, "data", take)
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
